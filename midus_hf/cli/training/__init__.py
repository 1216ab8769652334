"""Commands that train: `midus train` and `midus sft`."""
