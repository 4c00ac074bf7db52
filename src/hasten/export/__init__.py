"""hasten.export"""
