"""What every report begins with: the facts without which a number or a bad answer means nothing."""
