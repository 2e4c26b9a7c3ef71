"""Tags and filters of the dashboard's templates."""
