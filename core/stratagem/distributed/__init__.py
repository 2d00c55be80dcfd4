"""The processes of a run: environment variables, rendezvous, process groups, collectives and error reports."""
