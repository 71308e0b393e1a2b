"""Small faults, one at a time, in the pure folders: which of them does no test notice? ``make mutants`` runs it."""
