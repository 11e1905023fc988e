"""Runs: experiments prepared, trained round by round, kept in folders, resumed, measured."""
