"""Every baseline against a literal computation of what its authors' code does; nothing of that code is copied.

Each docstring says which facts are meant and at which repository and commit they were read.
"""
