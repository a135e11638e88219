"""How a rank stops waiting for others, and keeps nobody waiting, when it leaves its groups."""
