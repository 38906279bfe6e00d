"""The tests of xopt; a package, so that its modules import each other by name."""
