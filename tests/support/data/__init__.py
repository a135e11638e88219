"""Tables and stores for tests of the data room."""
