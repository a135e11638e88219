"""Why a server says no to a request that is right in itself: it came to the wrong server, or at the wrong time."""


class NotPrimary(Exception):
    """Somebody else decides now: this server's view changed while it was at work, or the one who asks has another view."""


class Moved(Exception):
    """The one that was asked is not the one to ask any more: a new view came before its answer."""
