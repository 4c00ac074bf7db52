"""hasten.attention"""
