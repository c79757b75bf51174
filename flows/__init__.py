"""When work runs: plan, DVC driver, Prefect flow, command line. Computes nothing itself."""
