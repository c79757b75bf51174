"""One stage as a unit: contract, inputs, outputs, MLflow run, lineage record. `python -m tasks.NAME`."""
