"""``make simulate``: whole histories from one seed on a simulated disk, network and clock."""
