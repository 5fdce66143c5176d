"""Programs of the engines. Each runs in its engine's environment, which has nothing of this project."""
