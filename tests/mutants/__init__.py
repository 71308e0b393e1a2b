"""Small faults, one at a time, in pure folders and in shells: which does no test notice? ``make mutants`` runs it."""
