"""hasten.training"""
