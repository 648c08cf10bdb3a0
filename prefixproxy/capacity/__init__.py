"""`prefixproxy plan`: what a model takes in memory, and how many slots of which context fit."""
