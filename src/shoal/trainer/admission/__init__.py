"""What ranks must have in common before their first step."""
