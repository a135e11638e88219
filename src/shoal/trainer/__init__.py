"""The training run: the only room that sees every room below it. ``build`` makes the parts, ``loop`` runs them."""
