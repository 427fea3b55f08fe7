"""Memory, communication and minimum time of programs, compiled for devices that may be absent."""
