"""Mixture-of-depths attention (MoDA): heads also read what earlier layers wrote."""
