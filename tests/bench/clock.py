"""A clock that stands still unless a test advances it."""


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def program(self, *seconds: float):
        """Returns a program whose successive runs take the given seconds; the last time repeats."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run
