"""What this host has, and what follows for its ranks; read by odc-launch, doctor and the ranks. No torch."""
