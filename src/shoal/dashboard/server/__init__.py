"""Who may ask, what is answered, what is sent as it happens, and the process from its address to its end."""
