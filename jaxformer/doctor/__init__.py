"""Memory, communication and time of programs, compiled for machines that may be absent."""
