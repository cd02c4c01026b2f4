"""The fronts: sockets, messages and flags, translated to and from plain requests.  Nothing is computed here."""
