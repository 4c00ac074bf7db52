"""hasten.data"""
