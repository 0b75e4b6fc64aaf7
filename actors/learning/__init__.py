"""Length predictors and serving-time estimators, and how they learn while serving."""
