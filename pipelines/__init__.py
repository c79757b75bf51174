"""What a stage computes: plain PyTorch and PyArrow. Knows no Prefect, DVC or MLflow."""
