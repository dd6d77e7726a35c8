"""Tests; README.md beside this file says what lies where."""
