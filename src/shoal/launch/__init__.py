"""Starting, watching, blaming and ending processes."""
