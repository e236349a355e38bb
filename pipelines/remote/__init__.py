"""Data in object storage and on web servers: read in place, by ranges of bytes."""
