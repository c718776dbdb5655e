"""What is stored of a target: checkpoint and open intent, and the steps between them."""
