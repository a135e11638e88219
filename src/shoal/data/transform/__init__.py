"""Steps that prepare rows: fitted on the training rows, saved as data, applied by one function everywhere."""
