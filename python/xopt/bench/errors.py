"""What can go wrong in the bench in ways that its user can mend, and in ways that one row of the table reports."""


class BenchError(Exception):
    """A request that cannot be carried out; the message is for the user."""


class UnavailableError(Exception):
    """A contender that this build of torch or this CPU does not offer; the message says why."""


class WrongResultError(Exception):
    """A contender whose result is off the float64 reference: it gets no time."""
