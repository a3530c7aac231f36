"""Other packages that show a run's rows: TensorBoard, Weights & Biases, MLflow, Trackio."""
