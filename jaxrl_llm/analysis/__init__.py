"""Looking at runs and objectives: estimators with intervals, plots, weight landscapes, the direction autopsy."""
