"""One file per dataset; every module here registers its dataset when it is imported."""
