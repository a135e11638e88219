"""Takes in rows as they arrive, in a folder or from a queue of messages, each once: how far is committed with the rows."""
