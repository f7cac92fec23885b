"""Re-exports of the loss ops."""
