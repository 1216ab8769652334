"""Applications over the packages: methods compared with one another, each run a process of its own."""
