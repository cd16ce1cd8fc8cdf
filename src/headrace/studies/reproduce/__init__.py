"""Tables and figures of the papers as steps to run and numbers to compare with, both as data: see experiments/."""
