"""What a program needs of machines that need not be here: compiled for them, and read."""
