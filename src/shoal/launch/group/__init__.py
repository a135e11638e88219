"""A group of ranks as its supervisor starts it: what is asked for, where ranks meet, and who is in when some die."""
