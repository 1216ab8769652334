"""The command lines; torch and transformers are imported late, so that mistakes are reported at once."""
