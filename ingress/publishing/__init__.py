"""How rows are sent: three publishers with one contract, and what their answers are worth."""
