"""What the user asked for and cannot have."""


class LaunchError(Exception):
    """The message is for the user: it names the option, what came, and what would do."""
