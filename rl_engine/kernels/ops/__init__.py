"""Re-exports of the ops."""
