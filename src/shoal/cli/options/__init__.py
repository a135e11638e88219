"""Options that several verbs have."""
