"""hasten.bench"""
