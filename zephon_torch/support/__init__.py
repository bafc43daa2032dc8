"""Small helpers that know nothing of data: checks, locks, waiting, forks, optional packages."""
