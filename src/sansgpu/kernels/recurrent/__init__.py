"""Recurrent layers: the gated delta rule, selective scans and short convolutions."""
