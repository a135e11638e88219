"""Messages between the processes of a run: typed, checked before anything is allocated, each with a deadline.

Collectives (``comm/channel.py``) need every rank at every turn. A parameter server, a center and an election do not: anybody may
ask anybody, be answered much later, die, and come back. That is what is here, on ZeroMQ sockets.
"""
