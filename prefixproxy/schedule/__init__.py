"""Which request runs in which slot, and when. Pure: no I/O and no clock."""
